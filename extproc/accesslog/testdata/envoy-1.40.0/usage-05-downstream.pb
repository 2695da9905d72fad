


edge-1fairlead.downstreamì
é
©
	127.0.0.1ô¦
	127.0.0.1á½*ñ±²Ø˜ŠÂâ2ö«:±Þ[B—²\JƒvRš†„Z¹°~bŸñ†j
	127.0.0.1›Žr
	127.0.0.1´ªzaŠÊ
¨
fairlead.log—
$
decision1795987697475-007-0001

plan2a2e85f7a0acc72f

reason
weighted
&

request_id1795987697475-007-0001

strategy	dynamic
-
fairlead.peek

modelm

stream 
.
fairlead.served

host127.0.0.1:34587
>
fairlead.steer,
*
hosts!127.0.0.1:34587,127.0.0.1:34587šchat¢
	127.0.0.1ô¦ºÄ¢‡ÀÒ1795987697475-007-0001èöð¬øó€›ˆ˜http127.0.0.1:40673*/v1/chat/completions2Go-http-client/1.1B	192.0.2.2J1795987697475-007-0001X¿`j&
x-request-id1795987697475-007-0001p²xg"
ÈŒ–2via_upstream8_@Â